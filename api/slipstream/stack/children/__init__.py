"""One child process: started, watched, replaced, ended."""
